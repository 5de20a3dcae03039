"""From a folder or hub id to a model that is checked and ready to run."""
