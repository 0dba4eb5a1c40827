"""The load step of `loadtest.bench_residency`: what is sent when, what is seen meanwhile, and the picture of it."""
