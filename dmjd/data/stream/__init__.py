"""Tars that can only be read from front to back, such as what a command writes: no index, and no exact resume."""
