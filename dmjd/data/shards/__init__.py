"""Shard sets: images in webdataset tars with a manifest and an index, and the commands that build and check them."""
