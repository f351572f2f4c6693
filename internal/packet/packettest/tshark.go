// SPDX-License-Identifier: Apache-2.0

// Package packettest contains shared parts of tests of packets: random frames, and the dissection
// of frames by tshark.
package packettest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// Dissection is tshark's dissection of a frame.
type Dissection struct {
	// Protocols is the chain of dissectors, such as "eth:ethertype:ipv6:tcp".
	Protocols string
	// Fields has the values of the requested fields, by name. A field that is in two headers has
	// two values.
	Fields map[string][]string
	// Problems are malformed layers, expert items of severity warning or error, and wrong
	// checksums.
	Problems []string
}

// Severities of Wireshark's expert items. The lower ones are chat and note.
const expertWarning = "6291456"
const expertError = "8388608"

// duplicateSACK is the expert item about a TCP option that reports a segment received twice (RFC
// 2883). It is no problem: a busy machine is late, and then sends segments twice.
const duplicateSACK = "D-SACK Sequence"

var checksumStatus = []string{"ip.checksum.status", "tcp.checksum.status", "udp.checksum.status",
	"icmp.checksum.status", "icmpv6.checksum.status"}

// Dissect makes tshark dissect frames, check every checksum, and read the named fields. It skips
// the test if tshark is not installed.
func Dissect(t testing.TB, frames [][]byte, fields ...string) []Dissection {
	t.Helper()
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("tshark is not installed; it is the judge of what this test makes")
	}
	arguments := []string{"-n", "-r", writePcap(t, frames), "-T", "json", "--no-duplicate-keys",
		"-o", "ip.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
		// Each frame is checked by itself, so missing packets between frames and incomplete
		// application messages are not problems. A client's port may be one that a protocol has
		// registered.
		"-o", "tcp.analyze_sequence_numbers:FALSE", "-d", "tcp.port==1-65535,data", "-d", "udp.port==1-65535,data"}
	command := exec.Command(tshark, arguments...)
	var complaints strings.Builder
	command.Stderr = &complaints
	output, err := command.Output()
	if err != nil {
		t.Fatalf("tshark: %v: %s", err, complaints.String())
	}
	var packets []struct {
		Source struct{ Layers map[string]any } `json:"_source"`
	}
	if err := json.Unmarshal(output, &packets); err != nil {
		t.Fatalf("tshark's output: %v", err)
	}
	if len(packets) != len(frames) {
		t.Fatalf("tshark dissected %d of %d frames", len(packets), len(frames))
	}
	out := make([]Dissection, len(frames))
	for i, packet := range packets {
		out[i] = dissection(packet.Source.Layers, fields)
	}
	return out
}

// dissection returns the dissection of a frame from tshark's tree of its layers. tshark gives the
// expert items in two lists, of severities and of messages, in the same order.
func dissection(tree map[string]any, fields []string) Dissection {
	all := map[string][]string{}
	collect(tree, all)
	d := Dissection{Protocols: strings.Join(all["frame.protocols"], ","), Fields: map[string][]string{}}
	for _, field := range fields {
		d.Fields[field] = all[field]
	}
	for i, severity := range all["_ws.expert.severity"] {
		message := all["_ws.expert.message"][i]
		if (severity == expertWarning || severity == expertError) && message != duplicateSACK {
			d.Problems = append(d.Problems, "expert: "+message)
		}
	}
	for name := range all {
		if strings.HasPrefix(name, "_ws.malformed") || strings.HasPrefix(name, "_ws.short") {
			d.Problems = append(d.Problems, name)
		}
	}
	for _, name := range checksumStatus {
		for _, status := range all[name] {
			if status != "1" { // 1: the checksum is right
				d.Problems = append(d.Problems, fmt.Sprintf("%s is %s", name, status))
			}
		}
	}
	slices.Sort(d.Problems)
	return d
}

// collect adds the values of all fields below a node of tshark's tree to the map into, by the names
// of the fields. An inner node has no value, so collect adds only its name.
func collect(node any, into map[string][]string) {
	switch n := node.(type) {
	case []any:
		for _, element := range n {
			collect(element, into)
		}
	case map[string]any:
		for name, child := range n {
			into[name] = append(into[name], values(child)...)
			collect(child, into)
		}
	}
}

// values returns the values of a field: one, or several in a list.
func values(node any) []string {
	switch n := node.(type) {
	case string:
		return []string{n}
	case []any:
		var out []string
		for _, element := range n {
			out = append(out, values(element)...)
		}
		return out
	}
	return nil
}

// writePcap writes frames to a capture file, and returns its path.
func writePcap(t testing.TB, frames [][]byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "frames.pcap")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	writer := pcapgo.NewWriter(file)
	if err := writer.WriteFileHeader(1<<18, layers.LinkTypeEthernet); err != nil {
		t.Fatal(err)
	}
	for i, frame := range frames {
		info := gopacket.CaptureInfo{Timestamp: time.Unix(int64(i), 0), CaptureLength: len(frame), Length: len(frame)}
		if err := writer.WritePacket(info, frame); err != nil {
			t.Fatal(err)
		}
	}
	return path
}
