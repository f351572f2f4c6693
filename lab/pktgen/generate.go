// SPDX-License-Identifier: Apache-2.0

package pktgen

//go:generate go tool bpf2go -target bpfel pktgen ../../bpf/pktgen/pktgen.bpf.c -- -I../../bpf
