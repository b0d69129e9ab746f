"""Studies of the paper's claims: many small trainings on one GPU, with seeds. See __main__.py."""
