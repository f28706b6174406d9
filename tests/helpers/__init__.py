"""Shared by the tests: programs and inputs, the fp64 oracle, the error budget, broken kernels."""
