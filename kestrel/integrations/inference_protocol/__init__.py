"""Skills as the inference protocol of KServe and Triton sees them: named tensors in, one JSON text out."""
