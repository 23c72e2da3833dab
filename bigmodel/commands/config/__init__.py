"""The config file of `bigmodel launch`."""
