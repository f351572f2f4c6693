// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/p4"
)

// ErrNotPrimary says that another controller with a higher election ID programs the switch.
var ErrNotPrimary = errors.New("another controller with a higher election ID programs the switch")

// answerPatience is how long a switch may take to say who is primary.
const answerPatience = 5 * time.Second

var errSilent = fmt.Errorf("the switch does not say within %v which controller is primary", answerPatience)

// mostUpdates is how many updates one request has. A message of gRPC has at most 4 MB.
const mostUpdates = 4096

// Client is the connection of one controller with one switch (P4Runtime 1.4, section 5). Only the
// primary controller may write. The other controllers may read.
type Client struct {
	*Reader
	stream   p4v1.P4Runtime_StreamChannelClient
	abandon  context.CancelCauseFunc // ends the stream
	election *p4v1.Uint128
	primary  bool
	ended    chan struct{} // closed when the stream has ended, or another controller is primary
	err      error         // why; to be read after ended
}

// Dial connects with a switch, and asks to be its primary controller. Of several controllers, the one
// with the highest election ID is the primary one. Dial returns an error if the switch cannot be
// reached, does not have the device, or another controller has the same ID.
func Dial(ctx context.Context, to *desired.Switch) (*Client, error) {
	reader, err := NewReader(to)
	if err != nil {
		return nil, err
	}
	c := &Client{Reader: reader, election: &p4v1.Uint128{Low: to.ElectionID}, ended: make(chan struct{})}
	if err := c.arbitrate(ctx); err != nil {
		c.abandon(nil)
		return nil, errors.Join(fmt.Errorf("switch %s: %w", to.Address, err), reader.Close())
	}
	go c.receive()
	return c, nil
}

// arbitrate opens the stream and announces the election ID. The switch answers who is primary.
func (c *Client) arbitrate(ctx context.Context) (err error) {
	ctx, c.abandon = context.WithCancelCause(ctx)
	defer time.AfterFunc(answerPatience, func() { c.abandon(errSilent) }).Stop()
	if c.stream, err = c.stub.StreamChannel(ctx); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	answer, err := c.announce()
	if err == nil && arbitrated(answer) == codes.NotFound {
		// The primary controller has gone. A switch accepts no lower ID than the highest one that it
		// has ever seen (P4Runtime 1.4, section 5.3).
		c.election = next(answer.GetArbitration().GetElectionId())
		answer, err = c.announce()
	}
	if err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	switch code := arbitrated(answer); code {
	case codes.OK:
		c.primary = true
	case codes.AlreadyExists, codes.NotFound: // there is another primary controller
	default:
		return status.Error(code, answer.GetArbitration().GetStatus().GetMessage())
	}
	return nil
}

// announce sends the election ID, and returns the switch's answer.
func (c *Client) announce() (*p4v1.StreamMessageResponse, error) {
	err := c.stream.Send(&p4v1.StreamMessageRequest{Update: &p4v1.StreamMessageRequest_Arbitration{
		Arbitration: &p4v1.MasterArbitrationUpdate{DeviceId: c.device, ElectionId: c.election},
	}})
	if err != nil {
		return nil, err
	}
	return c.stream.Recv()
}

// next returns the next higher election ID.
func next(id *p4v1.Uint128) *p4v1.Uint128 {
	above := &p4v1.Uint128{High: id.GetHigh(), Low: id.GetLow() + 1}
	if above.Low == 0 {
		above.High++
	}
	return above
}

// arbitrated returns what the switch says about the primary controller. OK: it is this one.
func arbitrated(answer *p4v1.StreamMessageResponse) codes.Code {
	return codes.Code(answer.GetArbitration().GetStatus().GetCode())
}

// receive notes the end of the stream, and that another controller has become the primary one. It
// ignores everything else that the switch says.
func (c *Client) receive() {
	defer close(c.ended)
	for {
		answer, err := c.stream.Recv()
		switch {
		case err != nil:
			c.err = fmt.Errorf("the switch has ended the connection: %w", err)
			return
		case c.primary && answer.GetArbitration() != nil && arbitrated(answer) != codes.OK:
			c.err = ErrNotPrimary
			return
		}
	}
}

// Close ends the connection. The switch keeps its entries.
func (c *Client) Close() error {
	err := c.stream.CloseSend()
	c.abandon(nil)
	return errors.Join(err, c.Reader.Close())
}

// IsPrimary tells whether this controller was the primary one when it connected.
func (c *Client) IsPrimary() bool { return c.primary }

// Configure makes the switch run the program of this build, unless it runs it already. Then all
// entries are gone. It reports whether the program was replaced.
func (c *Client) Configure(ctx context.Context) (replaced bool, err error) {
	if isRunning, err := c.runsProgram(ctx); isRunning || err != nil {
		return false, err
	}
	_, err = c.stub.SetForwardingPipelineConfig(ctx, &p4v1.SetForwardingPipelineConfigRequest{
		DeviceId: c.device, ElectionId: c.election,
		Action: p4v1.SetForwardingPipelineConfigRequest_VERIFY_AND_COMMIT,
		Config: &p4v1.ForwardingPipelineConfig{
			P4Info: c.program.info, P4DeviceConfig: p4.Config,
			Cookie: &p4v1.ForwardingPipelineConfig_Cookie{Cookie: cookie()},
		},
	})
	if err != nil {
		return false, fmt.Errorf("replace the program of the switch: %w", c.whyRefused(err))
	}
	return true, nil
}

// whyRefused explains an error of a write.
func (c *Client) whyRefused(err error) error {
	if status.Code(err) == codes.PermissionDenied {
		return ErrNotPrimary
	}
	return err
}

// Update is a change of an entry.
type Update struct {
	Kind p4v1.Update_Type
	Entry
}

// Write makes updates. A switch may make up to mostUpdates of them in any order (P4Runtime 1.4, section
// 12.1). After an error, it may have made some of them.
func (c *Client) Write(ctx context.Context, updates []Update) error {
	for len(updates) > 0 {
		part := updates[:min(len(updates), mostUpdates)]
		updates = updates[len(part):]
		request := &p4v1.WriteRequest{DeviceId: c.device, ElectionId: c.election}
		for i := range part {
			m, err := c.program.message(&part[i].Entry)
			if err != nil {
				return err
			}
			request.Updates = append(request.Updates, &p4v1.Update{
				Type: part[i].Kind, Entity: &p4v1.Entity{Entity: &p4v1.Entity_TableEntry{TableEntry: m}},
			})
		}
		if _, err := c.stub.Write(ctx, request); err != nil {
			return explain(part, c.whyRefused(err))
		}
	}
	return nil
}

// explain names the first update that a switch has refused, and why.
func explain(updates []Update, err error) error {
	for i, detail := range status.Convert(err).Details() {
		refused, ok := detail.(*p4v1.Error)
		if !ok || codes.Code(refused.CanonicalCode) == codes.OK || i >= len(updates) {
			continue
		}
		u := &updates[i]
		return fmt.Errorf("the switch refuses to %s the entry %x of table %s: %s (%v)",
			kindNames[u.Kind], u.Key, u.Table, refused.Message, codes.Code(refused.CanonicalCode))
	}
	return err
}

var kindNames = map[p4v1.Update_Type]string{
	p4v1.Update_INSERT: "add", p4v1.Update_MODIFY: "change", p4v1.Update_DELETE: "remove",
}
