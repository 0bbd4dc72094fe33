"""From files to microbatches: every record used or accounted for, every label right or refused."""
