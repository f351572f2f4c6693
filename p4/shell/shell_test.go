// SPDX-License-Identifier: Apache-2.0

package shell

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"
	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// The compiled programs are those of the source.
func TestCompiledFilesAreOfTheSource(t *testing.T) {
	source, err := os.ReadFile("shell.p4")
	testhost.Must(t, err)
	noted, err := os.ReadFile("shell.sha256")
	testhost.Must(t, err)
	sum := sha256.Sum256(source)
	if want := hex.EncodeToString(sum[:]); strings.TrimSpace(string(noted)) != want {
		t.Errorf("shell-*.json and shell.p4info.txtpb are of another source: compile it (shell.go), and write %s to shell.sha256", want)
	}
}

var (
	client = netip.MustParseAddrPort("[2001:db8:c::1]:50000")
	vip    = netip.MustParseAddrPort("[2001:db8:f::1]:80")
	// The servers of the client's bucket: the row, and a column for each candidate.
	row     = []netip.Addr{netip.MustParseAddr("2001:db8:1::"), netip.MustParseAddr("2001:db8:2::")}
	columns = [][]netip.Addr{
		{netip.MustParseAddr("2001:db8:1::"), netip.MustParseAddr("2001:db8:3::")},
		{netip.MustParseAddr("2001:db8:2::")},
	}
)

// option is a part of the options of a TCP header.
type option = []packet.Option

var (
	nop = packet.TCPOption(layers.TCPOptionKindNop, nil)
	// Timestamps as hosts send them. The last bit of the echo is the cookie.
	ofFirst  = option{packet.Timestamps(9, 0x706)}
	ofSecond = option{packet.Timestamps(9, 0x707)}
)

// sack returns SACKs of some blocks, as hosts send them.
func sack(blocks int) option {
	return option{nop, nop, packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8*blocks))}
}

// segment returns a TCP segment to the VIP.
func segment(flags packet.TCPFlags, options ...option) []byte {
	return packet.TCP(client, vip, append(slices.Concat(options...), packet.Flags(flags))...)
}

// TestPackets sends packets through all variants on the software switch, and compares all bytes with
// sections III and IV of the paper.
func TestPackets(t *testing.T) {
	sw, address := switchtest.StartEmpty(t)
	c := dial(t, address)
	for _, variant := range Variants {
		c.load(t, variant)
		for _, p := range []struct {
			name  string
			frame []byte
			list  []netip.Addr
		}{
			{"SYN", segment(packet.SYN, option{packet.MSS(1440)}, ofFirst), row},
			{"SYN without timestamps", segment(packet.SYN, option{packet.MSS(1440)}), row[:1]},
			{"SYN with timestamps only", segment(packet.SYN, ofFirst), row[:1]},
			{"long SYN without timestamps", segment(packet.SYN, option{packet.MSS(1440)}, sack(1)), row},
			{"ACK of the first candidate", segment(packet.ACK, ofFirst), columns[0]},
			{"ACK of the second candidate", segment(packet.ACK, ofSecond), columns[1]},
			{"SYN-ACK", segment(packet.SYN|packet.ACK, ofSecond), columns[1]},
			{"ACK without options", segment(packet.ACK), columns[0]},
			{"timestamps, SACK", segment(packet.ACK, ofSecond, sack(1)), found(variant >= 11)},
			{"timestamps, 2 blocks", segment(packet.ACK, ofSecond, sack(2)), found(variant >= 13)},
			{"timestamps, 3 blocks", segment(packet.ACK, ofSecond, sack(3)), found(variant >= 15)},
			{"SACK, timestamps", segment(packet.ACK, sack(1), ofSecond), found(variant >= 11)},
			{"2 blocks, timestamps", segment(packet.ACK, sack(2), ofSecond), found(variant >= 13)},
			{"3 blocks, timestamps", segment(packet.ACK, sack(3), ofSecond), found(variant >= 15)},
			{"another length", segment(packet.ACK, ofSecond, option{nop}), found(false)},
			{"another order", segment(packet.ACK, option{nop, nop}, ofSecond, sack(1)[:1]), found(false)},
		} {
			sw.Send(t, switchtest.Network, p.frame)
			want := insert(p.frame, p.list)
			if got := sw.Receive(t, switchtest.Host); !bytes.Equal(got, want) {
				t.Errorf("d_off_max = %d, %s:\n%x\nwant\n%x", variant, p.name, got, want)
			}
		}
	}
}

// found returns the servers of a packet to the second candidate, if the program finds its cookie.
// Without a cookie, it takes the first one (footnote 2).
func found(cookie bool) []netip.Addr {
	if cookie {
		return columns[1]
	}
	return columns[0]
}

// insert returns a frame with the segment routing header that the paper describes: the servers and
// the VIP.
func insert(frame []byte, servers []netip.Addr) []byte {
	n := byte(len(servers))
	srh := append([]byte{6, 2 * (n + 1), 4, n, n, 0, 0, 0}, frame[38:54]...)
	for i := range servers {
		srh = append(srh, servers[len(servers)-1-i].AsSlice()...)
	}
	out := append([]byte(nil), frame[:54]...)
	binary.BigEndian.PutUint16(out[18:], binary.BigEndian.Uint16(out[18:])+uint16(len(srh)))
	out[20] = 43
	copy(out[38:], servers[0].AsSlice())
	return append(append(out, srh...), frame[54:]...)
}

// controller programs a switch.
type controller struct {
	p4v1.P4RuntimeClient
	info *configv1.P4Info
}

var election = &p4v1.Uint128{Low: 1}

// dial connects with a switch, and becomes its primary controller.
func dial(t *testing.T, address string) *controller {
	t.Helper()
	text, err := os.ReadFile("shell.p4info.txtpb")
	testhost.Must(t, err)
	c := &controller{info: &configv1.P4Info{}}
	testhost.Must(t, prototext.Unmarshal(text, c.info))
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, connection.Close()) })
	c.P4RuntimeClient = p4v1.NewP4RuntimeClient(connection)
	stream, err := c.StreamChannel(t.Context(), grpc.WaitForReady(true))
	testhost.Must(t, err)
	testhost.Must(t, stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{ElectionId: election},
	}}))
	_, err = stream.Recv()
	testhost.Must(t, err)
	return c
}

// load makes the switch run a variant, in which all buckets have the servers of the client's.
func (c *controller) load(t *testing.T, variant int) {
	t.Helper()
	_, err := c.SetForwardingPipelineConfig(t.Context(), &p4v1.SetForwardingPipelineConfigRequest{
		ElectionId: election, Action: p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
		Config: &p4v1.ForwardingPipelineConfig{P4Info: c.info, P4DeviceConfig: Program(variant)},
	})
	testhost.Must(t, err)
	bucket := bucketOfClient()
	updates := []*p4v1.Update{c.list("consistent_hashing", row, bucket)}
	for i, column := range columns {
		updates = append(updates, c.list("choice_history", column, bucket, []byte{byte(i)}))
	}
	for _, server := range row {
		updates = append(updates, c.entry("interfaces", "forward", [][]byte{server.AsSlice()}, []byte{switchtest.Host}))
	}
	_, err = c.Write(t.Context(), &p4v1.WriteRequest{ElectionId: election, Updates: updates})
	testhost.Must(t, err)
}

// bucketOfClient returns the bucket of the client's flow.
func bucketOfClient() []byte {
	key := slices.Concat(client.Addr().AsSlice(), vip.Addr().AsSlice(), []byte{6})
	key = binary.BigEndian.AppendUint16(key, client.Port())
	key = binary.BigEndian.AppendUint16(key, vip.Port())
	const buckets = 35591
	return p4switch.Number(uint64(crc32.ChecksumIEEE(key) % buckets))
}

// list returns the entry of a segment list.
func (c *controller) list(table string, servers []netip.Addr, key ...[]byte) *p4v1.Update {
	return c.entry(table, "set_list", key,
		[]byte{byte(len(servers))}, servers[0].AsSlice(), servers[len(servers)-1].AsSlice())
}

// entry returns a message that adds an entry.
func (c *controller) entry(table, action string, key [][]byte, params ...[]byte) *p4v1.Update {
	e := &p4v1.TableEntry{}
	a := &p4v1.Action{}
	for _, t := range c.info.Tables {
		if t.Preamble.Alias == table {
			e.TableId = t.Preamble.Id
		}
	}
	for _, candidate := range c.info.Actions {
		if candidate.Preamble.Alias == action {
			a.ActionId = candidate.Preamble.Id
		}
	}
	for i, value := range key {
		e.Match = append(e.Match, &p4v1.FieldMatch{
			FieldId:        uint32(i + 1),
			FieldMatchType: &p4v1.FieldMatch_Exact_{Exact: &p4v1.FieldMatch_Exact{Value: value}},
		})
	}
	for i, value := range params {
		a.Params = append(a.Params, &p4v1.Action_Param{ParamId: uint32(i + 1), Value: value})
	}
	e.Action = &p4v1.TableAction{Type: &p4v1.TableAction_Action{Action: a}}
	return &p4v1.Update{Type: p4v1.Update_INSERT, Entity: &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: e}}}
}
