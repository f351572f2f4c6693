// SPDX-License-Identifier: Apache-2.0

// Package shell contains SHELL's own balancer in P4_16 (shell.p4), as it is compiled for the software
// switch bmv2. It is for comparisons (docs/research/reproduction.md). The compiled files are
// committed, because the compiler is in no package registry:
//
//	for d in 8 11 13 15; do
//	    p4c-bm2-ss --std p4-16 -DD_OFF_MAX=$d --p4runtime-files shell.p4info.txtpb \
//	        -o shell-$d.json shell.p4
//	done
package shell

import (
	"embed"
	"fmt"
)

// Variants are the data offsets of the longest TCP headers whose options are parsed, in units of 4
// bytes (section IV of the paper). There is a program for each.
var Variants = []int{8, 11, 13, 15}

//go:embed shell-8.json shell-11.json shell-13.json shell-15.json
var programs embed.FS

// Program returns the program of a variant, as p4c-bm2-ss writes it.
func Program(variant int) []byte {
	text, err := programs.ReadFile(fmt.Sprintf("shell-%d.json", variant))
	if err != nil {
		panic(err) // it is not one of Variants
	}
	return text
}
