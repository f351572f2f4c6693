package balancer

//go:generate go tool bpf2go -target bpfel -type encapsulation -type placement -type persistence -type server_flags -type flow_state -type reason balancer ../../bpf/balancer.bpf.c -- -I../../bpf
