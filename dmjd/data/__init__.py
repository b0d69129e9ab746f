"""Data sets, keyed crops and the deterministic loader: a training batch is a pure function of (seed, step)."""
