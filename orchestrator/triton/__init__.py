"""Everything that knows Triton: tensors in and out of `pb_utils`, BLS calls, the hosts of our Triton models."""
