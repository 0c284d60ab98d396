"""The rules of sampling once more, slow and obvious, in numpy and float64: what answers and tests are judged by."""
