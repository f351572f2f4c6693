// SPDX-License-Identifier: Apache-2.0

package dataplane

//go:generate go tool bpf2go -target bpfel siphash ../../../bpf/test/siphash.bpf.c -- -I../../../bpf

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"testing"

	dchest "github.com/dchest/siphash"

	"github.com/segue-lb/segue/internal/testhost"
)

// sipVectors are the vectors that the authors of SipHash published with their implementation
// (vectors_sip64), for messages of whole words. The message is the bytes 0, 1, 2 and so on, and the
// key is the bytes 0 to 15.
var sipVectors = []string{
	"310e0edd47db6f72", "6224939a79f5f593", "db9bc2577fcc2a3f", "94af49f6c650adb8",
	"ce7cf2722f512771", "d0a704536ba93e0e", "51a9cb9ecba312e6", "bd838d3aafbf8db7",
}

type sipWords struct {
	key     [16]byte
	message [56]byte
}

// hash returns the program's hashes of the first words of the message, for none to seven words.
func (w sipWords) hash(t *testing.T, objects *siphashObjects) (hashes [8]uint64) {
	t.Helper()
	for variable, value := range map[interface{ Set(any) error }]any{objects.Key: w.key, objects.Message: w.message} {
		testhost.Must(t, variable.Set(value))
	}
	if _, err := objects.HashAll.Run(nil); err != nil {
		t.Fatal(err)
	}
	testhost.Must(t, objects.Hashes.Get(&hashes))
	return hashes
}

// The SipHash of the data path and that of the tests both return the published vectors, and agree
// on random messages.
func TestSipHash(t *testing.T) {
	t.Parallel()
	testhost.NeedBPF(t)
	var objects siphashObjects
	if err := loadSiphashObjects(&objects, nil); err != nil {
		t.Fatalf("%+v", err)
	}
	defer objects.Close()
	var words sipWords
	for i := range words.message {
		words.message[i] = byte(i)
	}
	copy(words.key[:], words.message[:])
	for n, hash := range words.hash(t, &objects) {
		var got [8]byte
		binary.LittleEndian.PutUint64(got[:], hash)
		if want := sipVectors[n]; hex.EncodeToString(got[:]) != want {
			t.Errorf("of %d bytes %x, want %s", 8*n, got, want)
		}
	}
	random := rand.NewChaCha8([32]byte{1})
	for range 1000 {
		_, _ = random.Read(words.key[:])
		_, _ = random.Read(words.message[:])
		for n, hash := range words.hash(t, &objects) {
			k0, k1 := binary.LittleEndian.Uint64(words.key[:]), binary.LittleEndian.Uint64(words.key[8:])
			if want := dchest.Hash(k0, k1, words.message[:8*n]); hash != want {
				t.Fatalf("of %x by %x: %#x, want %#x", words.message[:8*n], words.key, hash, want)
			}
		}
	}
}
