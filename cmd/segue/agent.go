// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/runstate"
)

func newAgent() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "agent -c FILE",
		Short: "Run the agent of a server",
		Long: `Run the agent of a server in the foreground.

On SIGHUP the agent reads its configuration again. It refuses an invalid file and
keeps the running configuration. When the process ends, the data path stays in the
kernel and keeps delivering packets. The next start takes the data path over without
losing a packet. "segue agent detach" removes the data path.`,
		Example: "  segue agent -c /etc/segue/agent.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDaemon(cmd, func(ctx context.Context, f *foreground) error {
				return runAgent(ctx, file, f)
			})
		},
	}
	configFlag(cmd, &file)
	cmd.AddCommand(newDetach(datapath.RoleAgent, agent.Detach))
	return cmd
}

func runAgent(ctx context.Context, file string, f *foreground) error {
	log := f.log
	cfg, warnings, err := config.LoadAgent(file)
	if err != nil {
		return err
	}
	logWarnings(log, warnings)
	lock, err := lockInstance(cfg.Node.Instance)
	if err != nil {
		return err
	}
	defer lock.Close()
	metrics, err := daemon.ListenMetrics(cfg.Metrics.Listen, "segue_agent", log)
	if err != nil {
		return err
	}
	defer metrics.Close()
	a, err := agent.New(cfg, log)
	if err != nil {
		return err
	}
	defer a.Close()
	metrics.MustRegister(a)
	recorder := runstate.NewRecorder(lock, string(datapath.RoleAgent), file, cfg.Fixed(), log)
	defer recorder.Close()
	reload := metrics.TrackReloads(recorder.TrackReloads(func(ctx context.Context) error {
		cfg, warnings, err := config.LoadAgent(file)
		if err != nil {
			return err
		}
		if err := a.Reload(ctx, cfg); err != nil {
			return err
		}
		logWarnings(log, warnings)
		return nil
	}))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return metrics.Run(ctx) })
	group.Go(func() error {
		return daemon.Serve(ctx, a, reload, f.hangups, f.detachCommand("agent", cfg.Node.Instance), log)
	})
	return group.Wait()
}
