package agent

//go:generate go tool bpf2go -target bpfel -type accept_policy -type load_source -type agent_flow_state agent ../../bpf/agent.bpf.c -- -I../../bpf
