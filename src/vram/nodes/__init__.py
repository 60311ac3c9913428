"""Entries on other machines: the carrier that offers them, replicas that are pulled from it, engines for the bytes."""
