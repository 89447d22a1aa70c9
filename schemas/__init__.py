"""Documents, contracts and the strict JSON loader that every other package builds on."""
