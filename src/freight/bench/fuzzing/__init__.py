"""What `freight bench fuzz` feeds to Freight: records, templates, tokenizers and configs, and how each is spoiled."""
