"""Models of whole images with an output for each place: segmentation and detection."""
