// SPDX-License-Identifier: Apache-2.0

// Package p4 contains the balancer for switches: a program in P4_16 (docs/understand/p4.md), as it
// is compiled for v1model. The compiled files are committed, because the compiler is in no package
// registry. No code here runs the wrappers for other architectures.
//
// The command that compiles is:
//
//	p4c-bm2-ss --std p4-16 --p4runtime-files v1model.p4info.txtpb -o v1model.json v1model.p4
package p4

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"slices"
)

// Info describes the program's tables, in the text format of P4Runtime's p4.config.v1.P4Info.
//
//go:embed v1model.p4info.txtpb
var Info []byte

// Config is the program for the software switch bmv2.
//
//go:embed v1model.json
var Config []byte

//go:embed v1model.p4 core/*.p4
var source embed.FS

// Digest returns a hash of the source. The file v1model.sha256 has that of the source from which
// Info and Config were compiled.
func Digest() string {
	files, err := fs.Glob(source, "core/*.p4")
	if err != nil {
		panic(err) // the pattern is valid
	}
	sum := sha256.New()
	for _, name := range append([]string{"v1model.p4"}, slices.Sorted(slices.Values(files))...) {
		text, err := source.ReadFile(name)
		if err != nil {
			panic(err) // it is embedded
		}
		sum.Write(text)
	}
	return hex.EncodeToString(sum.Sum(nil))
}
