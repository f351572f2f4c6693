// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
)

// RunTime returns for how long the programs of an instance's links have run, each since it was
// loaded. The kernel measures that only while somebody holds the file of ebpf.EnableStats.
func RunTime(instance string) (sum time.Duration, err error) {
	pins, err := filepath.Glob(filepath.Join(Dir(instance), LinkPin+"*"))
	if err != nil {
		return 0, err
	}
	var known []ebpf.ProgramID
	for _, pin := range pins {
		id, err := programOf(pin)
		if err != nil {
			return 0, err
		}
		if slices.Contains(known, id) { // the program runs at two interfaces
			continue
		}
		known = append(known, id)
		used, err := runTimeOf(id)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", pin, err)
		}
		sum += used
	}
	return sum, nil
}

func runTimeOf(id ebpf.ProgramID) (time.Duration, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return 0, err
	}
	defer program.Close()
	stats, err := program.Stats()
	if err != nil {
		return 0, err
	}
	return stats.Runtime, nil
}
