"""Conformance suites and checkers, for this project and for whoever writes a driver, a wrapper or a transport.

A suite is a class to inherit from: supply the fixture it names and pytest runs its tests on your implementation.
Needs the extra ``vram[testing]``. Nothing else in the library imports this package.
"""
