"""From a config to what will run, and every fault that needs arithmetic over several keys."""
