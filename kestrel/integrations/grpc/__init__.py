"""The inference protocol of KServe and Triton over gRPC, without Triton. Needs the extra `grpc`."""
