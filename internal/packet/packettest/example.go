// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/hex"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Example is a packet that a document prints.
type Example struct {
	name   string
	digits string // hexadecimal; x stands for any digit
}

var (
	exampleName = regexp.MustCompile(`^    # ([^:]+):`)
	exampleRest = regexp.MustCompile(`#.*|\s`)
)

// Examples reads the packets that a document prints, and returns them by name. A packet is a block
// of text, indented by four columns. Its first line is "# NAME: description". Its other lines
// contain hexadecimal digits. A comment goes from # to the end of its line.
func Examples(t testing.TB, path string) map[string]Example {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	examples := map[string]Example{}
	name := ""
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "    ") {
			name = ""
		} else if m := exampleName.FindStringSubmatch(line); m != nil {
			name = m[1]
			examples[name] = Example{name: name}
		} else if name != "" {
			examples[name] = Example{name, examples[name].digits + exampleRest.ReplaceAllString(line, "")}
		}
	}
	return examples
}

// Frame returns an Ethernet frame with the packet. Digits that may have any value are zero.
func (e Example) Frame(t testing.TB, to, from [6]byte) []byte {
	t.Helper()
	p, err := hex.DecodeString(strings.ReplaceAll(e.digits, "x", "0"))
	if err != nil || len(p) == 0 {
		t.Fatalf("example %q: %q: %v", e.name, e.digits, err)
	}
	etherType := []byte{0x86, 0xdd}
	if p[0]>>4 == 4 {
		etherType = []byte{8, 0}
	}
	frame := append(append(to[:], from[:]...), etherType...)
	return append(frame, p...)
}

// Check fails the test if the packet of a frame differs from the example.
func (e Example) Check(t testing.TB, frame []byte) {
	t.Helper()
	got := []byte(hex.EncodeToString(frame[14:]))
	for i := range got {
		if i < len(e.digits) && e.digits[i] == 'x' {
			got[i] = 'x'
		}
	}
	if diff := cmp.Diff(e.digits, string(got)); diff != "" {
		t.Errorf("%s (-printed +made):\n%s", e.name, diff)
	}
}
