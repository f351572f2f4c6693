// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"math/rand/v2"
	"testing"
)

// mutantsPerInput is how many frames are compared together: enough for flows to live a life in a flow table.
const mutantsPerInput = 15

// Fuzz runs a fuzzer of a data path and its reference, which compare gives frames to. An input is a frame
// and a number, from which mutants of it and of the captures follow.
func Fuzz(f *testing.F, captures [][]byte, compare func(t *testing.T, frames [][]byte)) {
	for i, frame := range captures {
		f.Add(frame, uint64(0))
		f.Add(frame, uint64(i+1))
	}
	f.Fuzz(func(t *testing.T, frame []byte, seed uint64) {
		compare(t, Mutants(frame, seed, mutantsPerInput, captures))
	})
}

// How many inputs TryMutants tries. What is rarest comes once in a hundred.
const (
	leastInputs = 2_000
	mostInputs  = 50_000
)

// TryMutants gives compare random inputs of a fuzzer, however long they take, until nothing is missing of
// what they are to bring about. One that fails is printed as the fuzzer would write it.
func TryMutants(t *testing.T, fuzzer string, captures [][]byte,
	compare func(t *testing.T, frames [][]byte), missing func() []string,
) {
	for n := 0; n < leastInputs || len(missing()) > 0; n++ {
		if n == mostInputs {
			t.Fatalf("no mutant left as %v", missing())
		}
		try(t, fuzzer, captures[rand.IntN(len(captures))], rand.Uint64(), captures, compare)
		if t.Failed() {
			return
		}
	}
}

func try(t *testing.T, fuzzer string, frame []byte, seed uint64, captures [][]byte,
	compare func(t *testing.T, frames [][]byte),
) {
	defer func() { // compare may end the test
		if t.Failed() {
			t.Logf("as a seed in testdata/fuzz/%s:\ngo test fuzz v1\n[]byte(%q)\nuint64(%d)", fuzzer, frame, seed)
		}
	}()
	compare(t, Mutants(frame, seed, mutantsPerInput, captures))
}
