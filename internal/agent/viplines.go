// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
)

// Constants of bpf/agent/maps.h.
const (
	vipLineBits = 8 // VIP_LINE_BITS
	vipsPerLine = 4 // VIPS_PER_LINE
)

// vipLines is vip_lines of bpf/agent/maps.h: a hash table of VIPs that the program reads without a
// call, unlike the map vips. A VIP has a place in the line of its hash, unless the line is full.
type vipLines [1 << vipLineBits][vipsPerLine]address

// vipLine returns the number of the line that can have a VIP: a hash of the VIP.
func vipLine(vip address) uint64 {
	sum := binary.NativeEndian.Uint64(vip[:]) ^ binary.NativeEndian.Uint64(vip[8:])
	sum ^= sum >> 32
	return sum * 0x9e3779b97f4a7c15 >> (64 - vipLineBits) // spread in bpf/net/hash.h
}

// replace makes the lines hold the VIPs that are keys of want, as far as there is room. VIPs that
// stay keep their places, because packets read the lines meanwhile.
func (l *vipLines) replace(want map[address]uint32) {
	var none address // a free place
	held := map[address]bool{}
	for i := range l {
		for j, vip := range l[i] {
			if _, ok := want[vip]; !ok {
				l[i][j] = none
			}
			held[vip] = true
		}
	}
	inOrder := func(a, b address) int { return bytes.Compare(a[:], b[:]) }
	for _, vip := range slices.SortedFunc(maps.Keys(want), inOrder) {
		line := &l[vipLine(vip)]
		if free := slices.Index(line[:], none); free >= 0 && !held[vip] {
			line[free] = vip
		}
	}
}

// writeVIPLines writes the VIPs that are keys of want to the lines of the data path.
func (k *kernel) writeVIPLines(want map[address]uint32) error {
	var lines vipLines
	if err := k.objects.VipLines.Get(&lines); err != nil {
		return fmt.Errorf("read the VIPs: %w", err)
	}
	lines.replace(want)
	if err := k.objects.VipLines.Set(&lines); err != nil {
		return fmt.Errorf("write the VIPs: %w", err)
	}
	return nil
}
