"""Studies of the paper's claims on Fashion-MNIST: many small trainings on one GPU, with seeds. See __main__.py."""
