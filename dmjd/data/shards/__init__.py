"""Images in webdataset tars with an index: a manifest, a record a sample, and the verbs that make and check them."""
