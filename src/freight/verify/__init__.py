"""What correctness is measured with: tolerances, and a pool of ranks that tests share."""
