"""From documents to rows, in memory or in files: algorithms, mixtures, reports, packed files of every layout."""
