"""The calls that tests/cpu makes through Triton's interpreter and tests/gpu on a device, each in its own sizes."""
