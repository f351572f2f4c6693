// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/binary"
	"math"
	"testing"
)

// FuzzScoreboard reads any bytes as Apache's scoreboard.
func FuzzScoreboard(f *testing.F) {
	for _, l := range layouts {
		board := make([]byte, l.size(2, 3))
		binary.NativeEndian.PutUint32(board[globalServerLimit:], 2)
		binary.NativeEndian.PutUint32(board[globalThreadLimit:], 3)
		binary.NativeEndian.PutUint32(board[l.global+processPID:], 812)
		board[l.global+2*l.process+workerStatus] = 4
		f.Add(board)
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		board, err := parseScoreboard(content)
		if err != nil {
			return
		}
		if l := board.load(); l.Capacity == 0 || l.Busy > l.Capacity {
			t.Errorf("%d servers, %d threads: %+v", board.servers, board.threads, l)
		}
	})
}

// FuzzCgroupFiles reads any text as each of the files of a control group.
func FuzzCgroupFiles(f *testing.F) {
	for _, text := range []string{
		"usage_usec 7\nuser_usec 5\n", "usage_usec 18446744073709551616", "max 100000", "50000 100000",
		"18446744073709551615 1", "0-3,8", "", "3-1", "0-65535,0-65535",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		_, _ = parseUsage(text)
		if cpus, err := parseMax(text); err == nil && (cpus < 0 || math.IsNaN(cpus)) {
			t.Errorf("cpu.max %q grants %v", text, cpus)
		} else if err == nil {
			_ = milli(cpus)
		}
		if cpus, err := parseCPUList(text); err == nil && cpus < 0 {
			t.Errorf("the list %q has %d CPUs", text, cpus)
		}
	})
}
