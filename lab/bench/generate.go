// SPDX-License-Identifier: Apache-2.0

package bench

//go:generate go tool bpf2go -target bpfel host ../../bpf/bench/host.bpf.c -- -I../../bpf
//go:generate go tool bpf2go -target bpfel floor ../../bpf/bench/floor.bpf.c -- -I../../bpf
//go:generate go tool bpf2go -target bpfel steps ../../bpf/bench/steps.bpf.c -- -I../../bpf
//go:generate go tool bpf2go -target bpfel agentSteps ../../bpf/bench/agent_steps.bpf.c -- -I../../bpf
//go:generate go tool bpf2go -target bpfel reference ../../bpf/bench/reference_lru.bpf.c -- -I../../bpf
