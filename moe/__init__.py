"""What is computed: routers, losses, experts, the mixture layer, the transformer, kernels. One process, no ranks."""
