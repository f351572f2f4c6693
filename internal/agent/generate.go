package agent

//go:generate go tool bpf2go -target bpfel agent ../../bpf/agent.bpf.c -- -I../../bpf
