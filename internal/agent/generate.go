// SPDX-License-Identifier: Apache-2.0

package agent

//go:generate go tool bpf2go -target bpfel -type accept_policy -type load_source -type agent_flow_state -type socket_kind -type listener_state -type socket_query -type load_query -type count_correction -type backlog -type flow_key -type agent_flow_entry -type quic_own_id agent ../../bpf/agent/agent.bpf.c -- -I../../bpf
