"""Lets other processes in: the mechanism. Messages and descriptors, no drivers and no frameworks."""
