// SPDX-License-Identifier: Apache-2.0

package loadgen

//go:generate go tool bpf2go -target bpfel loadgen ../../bpf/loadgen/loadgen.bpf.c -- -I../../bpf
