// SPDX-License-Identifier: Apache-2.0

package lab

//go:generate go tool bpf2go -target bpfel -type port impair ../bpf/lab/impair.bpf.c
//go:generate go tool bpf2go -target bpfel wire ../bpf/lab/wire.bpf.c
