// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
)

// mutantsPerInput is the number of frames that are compared together. It is large enough for a flow
// to pass through the states of a flow table.
const mutantsPerInput = 15

// Fuzz fuzzes a data path and its reference. compare passes frames to both. An input is a frame and
// a number, which determine the mutants of the frame and of the captures.
//
// The captures are seeds only for the fuzzer. Where it does not run, TryMutants tries them and other
// mutants each time.
func Fuzz(f *testing.F, captures [][]byte, compare func(t *testing.T, frames [][]byte)) {
	if flag.Lookup("test.fuzz").Value.String() != "" {
		for i, frame := range captures {
			f.Add(frame, uint64(0))
			f.Add(frame, uint64(i+1))
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte, seed uint64) {
		compare(t, Mutants(frame, seed, mutantsPerInput, captures))
	})
}

// leastInputs is the minimum number of inputs of TryMutants. The rarest result occurs once in a
// hundred inputs.
var leastInputs = flag.Int("mutants", 1000,
	"how many inputs, each of 15 frames, a test of mutants tries at least")

// mostInputs is the maximum number of inputs of TryMutants.
const mostInputs = 50_000

// TryMutants passes all captures to compare, and then random inputs of a fuzzer until missing returns
// an empty result, however long that takes. It prints an input that fails in the fuzzer's format.
func TryMutants(t *testing.T, fuzzer string, captures [][]byte,
	compare func(t *testing.T, frames [][]byte), missing func() []string,
) {
	for frames := range slices.Chunk(captures, mutantsPerInput) {
		compare(t, frames)
	}
	for n := 0; n < *leastInputs || len(missing()) > 0; n++ {
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
