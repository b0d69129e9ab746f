"""Linear probe and kNN: what the frozen features of an encoder are worth."""
