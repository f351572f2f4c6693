// SPDX-License-Identifier: Apache-2.0

package quiclb

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/testhost"
)

// The vectors of appendix B.1. The second one has misprints in the draft: the nonce is 3487d970b,
// which is nine digits, and the connection ID is 20a350d28b4203487d970b. Here the nonce has a
// leading zero, and the first octet is 2a, which is rotation 1 and length 10.
func TestVectorsOfTheDraft(t *testing.T) {
	for _, v := range []struct {
		rotation             uint8
		serverID, nonce, cid string
	}{
		{0, "c4605e", "4504cc4f", "07c4605e4504cc4f"},
		{1, "350d28b420", "03487d970b", "2a350d28b42003487d970b"},
	} {
		serverID, err := ParseServerID(v.serverID)
		testhost.Must(t, err)
		nonce, err := hex.DecodeString(v.nonce)
		testhost.Must(t, err)
		c := Config{v.rotation, len(serverID), len(nonce), true}
		cid, err := c.Encode(serverID, nonce)
		if err != nil || cid.String() != v.cid {
			t.Errorf("%+v encodes %s and %s as %s, error %v; want %s",
				c, v.serverID, v.nonce, cid, err, v.cid)
		}
		if got, ok := c.ServerID(cid); !ok || !bytes.Equal(got, serverID) {
			t.Errorf("%s has server ID %x, %t; want %s", cid, got, ok, v.serverID)
		}
	}
}

func ExampleConfig_Encode() {
	config := Config{Rotation: 1, ServerIDLength: 3, NonceLength: 8, EncodeLength: true}
	nonce := []byte{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77}
	cid, err := config.Encode([]byte{0xc4, 0x60, 0x5e}, nonce)
	if err != nil {
		panic(err)
	}
	serverID, ok := config.ServerID(cid)
	fmt.Printf("%s names %x: %t\n", cid, serverID, ok)
	// Output: 2bc4605e0011223344556677 names c4605e: true
}

func TestInvalidConfigs(t *testing.T) {
	for _, test := range []struct {
		config Config
		want   string
	}{
		{Config{7, 3, 4, true}, "rotation 7: must be 0 to 6"},
		{Config{255, 3, 4, false}, "rotation 255: must be 0 to 6"},
		{Config{0, 0, 4, true}, "server ID length 0: must be 1 to 15 octets"},
		{Config{0, 16, 4, true}, "server ID length 16: must be 1 to 15 octets"},
		{Config{0, 1, 3, true}, "nonce length 3: must be 4 to 18 octets"},
		{Config{0, 1, -1, true}, "nonce length -1: must be 4 to 18 octets"},
		{Config{0, 1, 19, true}, "nonce length 19: must be 4 to 18 octets"},
		{Config{0, 8, 12, true},
			"nonce length 12: must be at most 11 with server IDs of 8 octets"},
	} {
		serverID := make([]byte, test.config.ServerIDLength)
		if _, err := test.config.Generate(serverID); err == nil || err.Error() != test.want {
			t.Errorf("%+v: error %v, want %s", test.config, err, test.want)
		}
		if _, ok := test.config.ServerID(make([]byte, 20)); ok {
			t.Errorf("%+v reads a server ID", test.config)
		}
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []Config{
		{0, 1, 4, true}, {6, 15, 4, false}, {6, 1, 18, true}, {3, 9, 10, false},
	} {
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestEncodeWrongLengths(t *testing.T) {
	c := Config{0, 3, 4, true}
	_, err := c.Encode([]byte{0xc4, 0x60}, make([]byte, 4))
	if want := "server ID c460: is 2 octets, must be 3"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	_, err = c.Encode(make([]byte, 3), []byte{1, 2, 3, 4, 5})
	if want := "nonce 0102030405: is 5 octets, must be 4"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestParseServerID(t *testing.T) {
	if id, err := ParseServerID("C4605e"); err != nil || !bytes.Equal(id, []byte{0xc4, 0x60, 0x5e}) {
		t.Errorf("got %x, %v", id, err)
	}
	long := strings.Repeat("5a", 16)
	for text, want := range map[string]string{
		"":     `server ID "": is 0 octets, must be 1 to 15`,
		"c46":  `server ID "c46": must be an even number of hexadecimal digits`,
		"0xc4": `server ID "0xc4": must be an even number of hexadecimal digits`,
		long:   `server ID "` + long + `": is 16 octets, must be 1 to 15`,
	} {
		if _, err := ParseServerID(text); err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

// A connection ID names its server only if the rotation and the length are right.
func TestNamesNoServer(t *testing.T) {
	c := Config{2, 3, 4, true}
	cid, err := c.Generate([]byte{1, 2, 3})
	testhost.Must(t, err)
	otherRotation := c
	otherRotation.Rotation = 3
	if _, ok := otherRotation.ServerID(cid); ok {
		t.Errorf("rotation 3 reads %s", cid)
	}
	if _, ok := c.ServerID(cid[:7]); ok {
		t.Error("an ID of 7 octets is read")
	}
	if _, ok := c.ServerID(nil); ok {
		t.Error("an empty ID is read")
	}
	cid[0]-- // now tells a length of 6 octets, not of 7
	if _, ok := c.ServerID(cid); ok {
		t.Errorf("%s tells another length, and is read", cid)
	}
	withoutLength := c
	withoutLength.EncodeLength = false
	if _, ok := withoutLength.ServerID(cid); !ok {
		t.Errorf("%s is not read without EncodeLength", cid)
	}
}

// configs generates valid configurations.
func configs() *rapid.Generator[Config] {
	return rapid.Custom(func(t *rapid.T) Config {
		serverID := rapid.IntRange(MinServerIDLength, MaxServerIDLength).Draw(t, "server ID length")
		nonce := rapid.IntRange(MinNonceLength, maxBlockLength-serverID).Draw(t, "nonce length")
		return Config{
			Rotation:       rapid.Uint8Range(0, MaxRotation).Draw(t, "rotation"),
			ServerIDLength: serverID,
			NonceLength:    nonce,
			EncodeLength:   rapid.Bool().Draw(t, "encode length"),
		}
	})
}

func octets(t *rapid.T, n int, label string) []byte {
	return rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, label)
}

// ServerID returns the server ID that Encode was given, also if packet data follows the connection
// ID. A configuration with another rotation finds no server ID.
func TestReadsBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := configs().Draw(t, "config")
		serverID, nonce := octets(t, c.ServerIDLength, "server ID"), octets(t, c.NonceLength, "nonce")
		cid, err := c.Encode(serverID, nonce)
		if err != nil {
			t.Fatal(err)
		}
		if len(cid) != c.Length() || !bytes.HasSuffix(cid, nonce) {
			t.Fatalf("%s has length %d, want %d and nonce %x", cid, len(cid), c.Length(), nonce)
		}
		packet := append(cid, rapid.SliceOf(rapid.Byte()).Draw(t, "rest of the packet")...)
		if got, ok := c.ServerID(packet); !ok || !bytes.Equal(got, serverID) {
			t.Fatalf("%x has server ID %x, %t; want %x", packet, got, ok, serverID)
		}
		other := c
		step := rapid.Uint8Range(1, MaxRotation).Draw(t, "step")
		other.Rotation = (c.Rotation + step) % (MaxRotation + 1)
		if _, ok := other.ServerID(packet); ok {
			t.Fatalf("%+v reads %s", other, cid)
		}
	})
}

// No octets cause a panic, and IDs with rotation 7 never name a server.
func TestReadsAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := configs().Draw(t, "config")
		cid := rapid.SliceOfN(rapid.Byte(), 0, 24).Draw(t, "cid")
		serverID, ok := c.ServerID(cid)
		if ok && (!bytes.Equal(serverID, cid[1:1+c.ServerIDLength]) || cid[0]>>5 == 7) {
			t.Fatalf("%x has server ID %x", cid, serverID)
		}
	})
}

// Nonces and the random bits of the first octet differ from ID to ID.
func TestGenerateIsRandom(t *testing.T) {
	c := Config{5, 2, 8, false}
	const n = 1000
	nonces, firsts := map[string]bool{}, map[byte]bool{}
	for range n {
		cid, err := c.Generate([]byte{1, 2})
		testhost.Must(t, err)
		nonces[string(cid[3:])] = true
		firsts[cid[0]] = true
	}
	if len(nonces) != n {
		t.Errorf("%d different nonces in %d connection IDs", len(nonces), n)
	}
	// Some value of five bits is missing from 1000 draws with a probability below 10^-12.
	if len(firsts) != 32 {
		t.Errorf("%d different first octets, want 32", len(firsts))
	}
}
