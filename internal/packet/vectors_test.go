// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"encoding/hex"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// The vectors in this file were written manually from the RFCs. Their checksums were computed
// outside this package. The client's packets are empty UDP datagrams with DSCP EF, ECT(1) and a hop
// limit of 64.
const (
	ethernet6 = `020000000102 020000000101 86dd # to the next hop, from the balancer`
	ethernet4 = `020000000102 020000000101 0800`

	clientFrame6 = `
		020000000002 020000000001 86dd
		6b9abcde 0008 11 40             # payload length 8, UDP, hop limit 64
		20010db8000c00000000000000000002
		20010db8008000000000000000000001
		9c40 0050 0008 074d`
	clientFrame4 = `
		020000000002 020000000001 0800
		45 b9 001c 1234 4000 40 11 3bad # TTL 64
		c0000202 c6336401
		9c40 0050 0008 7716`

	forwarded6 = `
		6b9abcde 0008 11 3f             # hop limit 63
		20010db8000c00000000000000000002
		20010db8008000000000000000000001
		9c40 0050 0008 074d`
	forwarded4 = `
		45 b9 001c 1234 4000 3f 11 3cad # TTL 63
		c0000202 c6336401
		9c40 0050 0008 7716`
)

var vectors = []struct {
	name   string
	client string
	encap  packet.Encap
	want   string
}{
	{"srv6-insert, known flow", clientFrame6, srv6Encap(desired.SRv6Insert, deliver1), ethernet6 + `
		6b9abcde 0040 2b 3f                 # 56 bytes more; routing header
		20010db8000c00000000000000000002    # still from the client
		fd000005000000010005000000000000    # to s1::dv
		11 06 04 01 02 00 0000              # UDP, 48 bytes after the first 8, segments left 1, last entry 2
		20010db8008000000000000000000001    # [0] VIP
		fd000005000000010005000000000000    # [1] s1::dv
		fd00006c000000010000000000000000    # [2] lb
		9c40 0050 0008 074d`},
	{"srv6-insert, new flow", clientFrame6, srv6Encap(desired.SRv6Insert, deliver1, deliver2), ethernet6 + `
		6b9abcde 0050 2b 3f
		20010db8000c00000000000000000002
		fd000005000000010005000000000000
		11 08 04 02 03 00 0000              # segments left 2, last entry 3
		20010db8008000000000000000000001    # [0] VIP
		fd000005000000020005000000000000    # [1] s2::dv
		fd000005000000010005000000000000    # [2] s1::dv
		fd00006c000000010000000000000000    # [3] lb
		9c40 0050 0008 074d`},
	{"srv6-encap, known flow, IPv6", clientFrame6, srv6Encap(desired.SRv6Encap, deliver1), ethernet6 + `
		6b912345 0030 29 40                 # IPv6, hop limit 64
		fd00006c000000010000000000000000    # from lb
		fd000005000000010005000000000000    # to s1::dv` + forwarded6},
	{"srv6-encap, known flow, IPv4", clientFrame4, srv6Encap(desired.SRv6Encap, deliver1), ethernet6 + `
		6b912345 001c 04 40                 # IPv4
		fd00006c000000010000000000000000
		fd000005000000010005000000000000` + forwarded4},
	{"srv6-encap, new flow, IPv6", clientFrame6, srv6Encap(desired.SRv6Encap, deliver1, deliver2), ethernet6 + `
		6b912345 0048 2b 40
		fd00006c000000010000000000000000
		fd000005000000010005000000000000
		29 02 04 01 00 00 0000              # segments left 1, last entry 0: s1 is not in the list
		fd000005000000020005000000000000    # [0] s2::dv` + forwarded6},
	{"srv6-encap, new flow, IPv4", clientFrame4, srv6Encap(desired.SRv6Encap, deliver1, deliver2), ethernet6 + `
		6b912345 0034 2b 40
		fd00006c000000010000000000000000
		fd000005000000010005000000000000
		04 02 04 01 00 00 0000
		fd000005000000020005000000000000` + forwarded4},
	{"srv6-encap, whole list", clientFrame4, whole(srv6Encap(desired.SRv6Encap, deliver1, deliver2)), ethernet6 + `
		6b912345 0044 2b 40
		fd00006c000000010000000000000000
		fd000005000000010005000000000000
		04 04 04 01 01 00 0000              # segments left 1, last entry 1
		fd000005000000020005000000000000    # [0] s2::dv
		fd000005000000010005000000000000    # [1] s1::dv` + forwarded4},
	{"gre over IPv4, IPv6", clientFrame6, tunnel(desired.GRE, outer4), ethernet4 + `
		45 b9 0048 0000 4000 40 2f 25cc     # ID 0, don't fragment
		0a000001 0a000002
		0000 86dd` + forwarded6},
	{"gre over IPv4, IPv4", clientFrame4, tunnel(desired.GRE, outer4), ethernet4 + `
		45 b9 0034 0000 4000 40 2f 25e0
		0a000001 0a000002
		0000 0800` + forwarded4},
	{"gre over IPv6, IPv6", clientFrame6, tunnel(desired.GRE, outer6), ethernet6 + `
		6b912345 0034 2f 40
		fd000000000000000000000000000001
		fd000000000000000000000000000002
		0000 86dd` + forwarded6},
	{"gre over IPv6, IPv4", clientFrame4, tunnel(desired.GRE, outer6), ethernet6 + `
		6b912345 0020 2f 40
		fd000000000000000000000000000001
		fd000000000000000000000000000002
		0000 0800` + forwarded4},
	{"ipip over IPv4, IPv6", clientFrame6, tunnel(desired.IPIP, outer4), ethernet4 + `
		45 b9 0044 0000 4000 40 29 25d6
		0a000001 0a000002` + forwarded6},
	{"ipip over IPv4, IPv4", clientFrame4, tunnel(desired.IPIP, outer4), ethernet4 + `
		45 b9 0030 0000 4000 40 04 260f
		0a000001 0a000002` + forwarded4},
	{"ipip over IPv6, IPv6", clientFrame6, tunnel(desired.IPIP, outer6), ethernet6 + `
		6b912345 0030 29 40
		fd000000000000000000000000000001
		fd000000000000000000000000000002` + forwarded6},
	{"ipip over IPv6, IPv4", clientFrame4, tunnel(desired.IPIP, outer6), ethernet6 + `
		6b912345 001c 04 40
		fd000000000000000000000000000001
		fd000000000000000000000000000002` + forwarded4},
}

func TestBuildersMakeVectors(t *testing.T) {
	class := packet.TrafficClass(0xb9)
	udp6 := packet.UDP(client6, vip6, class, packet.FlowLabel(0xabcde))
	if diff := cmp.Diff(bytesOf(t, clientFrame6), udp6); diff != "" {
		t.Errorf("IPv6 (-want +got):\n%s", diff)
	}
	udp4 := packet.UDP(client4, vip4, class, packet.ID(0x1234))
	if diff := cmp.Diff(bytesOf(t, clientFrame4), udp4); diff != "" {
		t.Errorf("IPv4 (-want +got):\n%s", diff)
	}
}

func TestEncapsulateVectors(t *testing.T) {
	for _, v := range vectors {
		client := bytesOf(t, v.client)
		got, err := packet.Encapsulate(client, v.encap)
		if err != nil {
			t.Errorf("%s: %v", v.name, err)
			continue
		}
		if diff := cmp.Diff(bytesOf(t, v.want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", v.name, diff)
		}
		if diff := cmp.Diff(bytesOf(t, v.client), client); diff != "" {
			t.Errorf("%s changed its argument (-want +got):\n%s", v.name, diff)
		}
	}
}

func TestDeliverVectors(t *testing.T) {
	for _, v := range vectors {
		want := bytesOf(t, ethernet6+forwarded6)
		if v.client == clientFrame4 {
			want = bytesOf(t, ethernet4+forwarded4)
		}
		got, err := packet.Decapsulate(bytesOf(t, v.want))
		if err != nil {
			t.Errorf("%s: %v", v.name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", v.name, diff)
		}
	}
}

var notHex = regexp.MustCompile(`#[^\n]*|\s`)

// bytesOf parses hexadecimal text, with comments from # to the end of the line.
func bytesOf(t *testing.T, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(notHex.ReplaceAllString(text, ""))
	testhost.Must(t, err)
	return b
}
