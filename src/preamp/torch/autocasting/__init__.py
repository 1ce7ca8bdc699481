"""Autocast: a precision for each operator, by PyTorch's table or an edited one."""
