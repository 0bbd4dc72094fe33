"""From a configuration to steps: opens or packs data, streams it, and cuts rows into microbatches."""
