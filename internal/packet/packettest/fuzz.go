// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
)

// mutantsPerInput is the number of mutants that are compared one after the other. They are enough
// to lead a flow through the states of a flow table.
const mutantsPerInput = 15

// Fuzz fuzzes a data path and its reference. The function compare passes frames to both. The
// captures are valid frames. An input of the fuzzer is a frame and a seed, from which Mutants makes
// further frames of this frame and of the captures.
//
// The captures are seeds only if the fuzzer runs (go test -fuzz). Other test runs use TryMutants,
// which tries the captures and random mutants.
func Fuzz(f *testing.F, captures [][]byte, compare func(t *testing.T, frames [][]byte)) {
	if flag.Lookup("test.fuzz").Value.String() != "" {
		for i, frame := range captures {
			f.Add(frame, uint64(0))   // without mutants
			f.Add(frame, uint64(i+1)) // with mutants
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte, seed uint64) {
		compare(t, Mutants(frame, seed, mutantsPerInput, captures))
	})
}

// leastInputs is the least number of inputs that TryMutants tries. The rarest result occurs once in
// a hundred inputs.
var leastInputs = flag.Int("mutants", 1000,
	"how many inputs, each of 15 frames, a test of mutants tries at least")

// mostInputs is the number of inputs after which TryMutants gives up.
const mostInputs = 50_000

// TryMutants passes all captures to compare, and then random inputs of a fuzzer. It ends when it
// has tried leastInputs and missing returns an empty list: missing returns the results that no
// frame has had yet. If an input fails, TryMutants prints it in the format of the fuzzer's seeds.
func TryMutants(t *testing.T, fuzzer string, captures [][]byte,
	compare func(t *testing.T, frames [][]byte), missing func() []string,
) {
	for frames := range slices.Chunk(captures, mutantsPerInput) {
		compare(t, frames)
	}
	for n := 0; n < *leastInputs || len(missing()) > 0; n++ {
		if n >= mostInputs && n >= *leastInputs {
			t.Fatalf("no mutant had the results %v", missing())
		}
		try(t, fuzzer, captures[rand.IntN(len(captures))], rand.Uint64(), captures, compare)
		if t.Failed() {
			return
		}
	}
}

// try passes one input of a fuzzer to compare. If it fails, try prints it.
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
