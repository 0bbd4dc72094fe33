"""From what a config names to records: files, their formats and encodings, what is wrong with each record."""
