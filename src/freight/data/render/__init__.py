"""From a record to token ids and a loss mask: formats, chat templates, masks, truncation."""
