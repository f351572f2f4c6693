// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzRead reads any bytes as a file of load reports. No process has locked a slot, so nobody
// reports, whatever the slots contain.
func FuzzRead(f *testing.F) {
	page := make([]byte, fileSize)
	binary.NativeEndian.PutUint64(page[magicOffset:], magic)
	binary.NativeEndian.PutUint32(page[versionOffset:], version)
	f.Add(page, uint16(0))
	binary.NativeEndian.PutUint64(page[headerSize:], 3|4<<32)
	f.Add(page, uint16(1))
	f.Add([]byte(nil), uint16(0))
	path := filepath.Join(f.TempDir(), "load")
	f.Fuzz(func(t *testing.T, content []byte, truncated uint16) {
		testhost.Must(t, os.WriteFile(path, content, 0o600))
		r := NewReader(path)
		if busy, capacity, err := r.Read(); err == nil {
			t.Errorf("%d of %d", busy, capacity)
		}
		testhost.Must(t, os.Truncate(path, int64(truncated)))
		_, _, _ = r.Read() // must not crash
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
}
